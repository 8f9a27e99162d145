"""Reports on programs: explain, audit, advise, draw, profile, and the command line. The core never imports them."""
