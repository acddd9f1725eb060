"""How requests get in and tokens get out."""
