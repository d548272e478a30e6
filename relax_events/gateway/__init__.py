"""Sessions in which a foreign program talks with the policy: message graph, dialects of the model
APIs, and the engine that runs the programs as episodes.
"""
