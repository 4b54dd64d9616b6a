"""Serving a drafter in inference engines: the folders that they load. Each plug-in is a distribution of its own."""
