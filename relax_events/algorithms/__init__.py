"""The objective: advantages (numpy alone, for a light worker) and losses (torch). Import the
modules; this file loads neither.
"""
