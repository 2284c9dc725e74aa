#: name = "an exception of 30 MB"
#: right = ["error", "output_limit"]

raise ValueError('x' * 30_000_000)
