"""How a forward becomes pieces and graphs: levels, custom ops and the forward context.

This package knows torch only.
"""
