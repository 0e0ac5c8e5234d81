"""`penstock simulate`: a discrete-event model of a deployment, with the deployed autoscaler."""
