"""The benchmark of the planning of micro-batches, compared with other kits' planners."""
