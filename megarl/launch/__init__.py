"""Who is which rank: started by a launcher, or by megarl itself."""
