#: name = "an envelope of brackets"
#: right = ["protocol"]
#: lost = true
#: uses = ["frames"]

os.write(3, frame(b'[' * 4000))
