"""The engine `sglang`: an SGLang server, which it starts and tends, or one that runs already."""
