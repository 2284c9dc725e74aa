#: name = "an output flood"
#: right = ["output_limit"]
#: lost = true

while True: print('x' * 9999)
