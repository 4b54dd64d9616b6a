"""`hyperdflash check`: why a drafter that trained well accepts nothing, found by experiment."""
