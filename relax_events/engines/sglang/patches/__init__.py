"""What SGLang's own processes load of ours, by its plugin entry points."""
