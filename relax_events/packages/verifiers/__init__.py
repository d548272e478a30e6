"""The rewards that come with Relax Events, one small module for each kind of answer."""
