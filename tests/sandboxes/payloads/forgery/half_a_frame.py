#: name = "half a frame"
#: right = ["protocol"]
#: lost = true
#: uses = ["frames"]

os.write(3, b'\0\0\1')
while True: pass
