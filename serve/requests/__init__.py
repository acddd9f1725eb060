"""What a request says and what its text becomes: parameters, tokens, grammars, records."""
