"""The study of the second paper: does p > 2 really help, or does it only start sharper?"""
