"""Seeing every attention of a model as it runs, whoever wrote it, without changing what it computes.

Nothing here registers a hook of torch's: some modules take other paths where they have one, and other bits come out.
Methods and functions are replaced for as long as a model is watched, by ones that tell of q and k and then do the same.
"""
