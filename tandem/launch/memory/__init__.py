"""The memory plan: what lies on each GPU in each phase of a step, from the recipe and the models' shapes alone."""
