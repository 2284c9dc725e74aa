#: name = "an envelope of a number of 4000 digits"
#: right = ["protocol"]
#: lost = true
#: uses = ["frames"]

os.write(3, frame(b'{"id": ' + b'9' * 4000 + b'}'))
