"""Ways to run a custom class, compared with Cog's own server and with each other.

`compare` runs a folder of Cog projects both ways. `table` compares all ways.
"""
