"""Papers as data: what ``fedsim/papers/*.yaml`` holds. Nothing here imports torch: a list must not take seconds."""
