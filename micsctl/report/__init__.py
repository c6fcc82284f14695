"""Tables, plots and pages. Pure: values in, values or text out; cli/render.py prints them."""
