"""Papers as data: what ``fedsim/papers/*.yaml`` holds. Nothing here imports torch: to list papers must not take seconds."""
