-- The states of a record that no transition leaves.
local function is_over(state)
  return state == 'succeeded' or state == 'failed' or state == 'canceled'
end
