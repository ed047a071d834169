"""The common parts of the scripts in bench/; not installed. `runner` runs a script."""
