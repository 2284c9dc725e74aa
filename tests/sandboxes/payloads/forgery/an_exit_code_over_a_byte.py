#: name = "an exit code over a byte"
#: right = ["ok"]
#: lost = false
#: uses = ["frames"]

raise SystemExit(2 ** 70)
