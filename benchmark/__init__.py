"""`hyperdflash benchmark` and `plot`: acceptance and speed of all methods in one run, as tables and pictures."""
