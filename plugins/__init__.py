"""Adapters, one folder per engine. Each knows its engine and the core; nothing else knows the engine."""
