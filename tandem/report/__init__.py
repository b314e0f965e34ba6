"""One HTML file about one or more runs, from what their directories hold. Torch comes with flight records only."""
