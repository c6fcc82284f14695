"""Facts in, Plan out. Pure: no input or output here."""
