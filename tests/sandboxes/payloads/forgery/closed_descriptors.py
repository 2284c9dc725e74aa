#: name = "closed descriptors"
#: right = ["protocol"]
#: lost = true
#: uses = ["frames"]

os.closerange(0, 1024)
