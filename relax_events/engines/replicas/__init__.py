"""Several engines behind one: prompt groups are routed, and go elsewhere when an engine is lost."""
