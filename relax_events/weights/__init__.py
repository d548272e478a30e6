"""Policy weights as versioned artifacts: manifest, digests, delta, transports. Imports no torch;
`artifact_writer` and `broadcast` do.
"""

from relax_events.weights.manifest import WeightManifest, Weights

__all__ = ["WeightManifest", "Weights"]
