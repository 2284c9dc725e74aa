#: name = "a forged length"
#: right = ["protocol"]
#: lost = true
#: uses = ["frames"]

os.write(3, b'\xff' * 64)
