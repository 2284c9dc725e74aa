"""The benchmark of the plan of micro-batches, beside other kits' planners."""
