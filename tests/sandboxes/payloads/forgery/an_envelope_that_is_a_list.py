#: name = "an envelope that is a list"
#: right = ["protocol"]
#: lost = true
#: uses = ["frames"]

os.write(3, frame([1, 2]))
