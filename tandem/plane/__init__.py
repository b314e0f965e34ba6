"""Where samples wait between the rooms: columns of ragged rows."""
