"""How the ranks of a group find each other, and what connects them."""
