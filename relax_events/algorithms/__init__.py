"""Advantages (numpy alone) and losses (torch) of the algorithms. Import the modules; this file
imports neither.
"""
