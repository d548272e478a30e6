"""Plugins that SGLang's processes load through its entry points."""
