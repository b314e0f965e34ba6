"""`tandem drill`: a recipe's run for a few steps, with one real fault after the other."""
