"""Policy weights as versioned artifacts: manifest, digests, transports. Loads no torch by itself;
`artifacts` does.
"""

from relax_events.weights.manifest import WeightManifest, Weights

__all__ = ["WeightManifest", "Weights"]
