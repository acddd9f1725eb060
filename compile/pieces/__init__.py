"""From a module's forward to compiled pieces, and the function that calls them."""
