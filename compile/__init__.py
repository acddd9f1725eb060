"""How a forward becomes pieces and graphs. This package knows torch only."""
