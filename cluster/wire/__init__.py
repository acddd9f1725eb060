"""How frames travel between processes: sockets, their contexts, long messages, budgets, bells."""
