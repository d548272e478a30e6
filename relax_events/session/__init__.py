"""One `relax run` of a run: its derived settings, what a resumed run may change, and the record of
each session.
"""
