#: name = "an output flood of a shell"
#: right = ["output_limit"]
#: lost = false

yes
