"""Components that any method can be combined with: selection, privacy, robust rules, hardware and bytes."""
