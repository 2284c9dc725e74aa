#: name = "an exit with the code of a lost channel"
#: right = ["protocol", "error"]
#: lost = true
#: uses = ["frames"]

os._exit(70)
