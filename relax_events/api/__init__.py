"""What packages and users of the library import: one module for each kind of extension or reader.

`errors` and `events` are the vocabulary; `log` and `runs` read a run; `rewards`, `environments`,
`prompts`, `algorithms`, `engines`, `drivers`, `training`, `trackers`, `roles` and `http` are what
an extension implements or is given. docs/reference/api.md lists all names with their signatures,
and a test keeps that page equal to the code. Everything else of the library may change without
notice.
"""
