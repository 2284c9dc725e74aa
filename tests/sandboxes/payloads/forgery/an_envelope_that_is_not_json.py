#: name = "an envelope that is not JSON"
#: right = ["protocol"]
#: lost = true
#: uses = ["frames"]

os.write(3, frame(b'\xff\xfe{'))
