#: name = "answers of forked children"
#: right = ["ok"]
#: lost = false
#: uses = ["frames"]

for _ in range(3): os.fork()
