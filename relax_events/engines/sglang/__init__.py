"""The engine `sglang`: SGLang servers, started by the worker or already running."""
