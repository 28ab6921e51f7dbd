// sat8, sat16 and sat32 of docs/integer_network.md: clamp to OUT bits, two's complement.
module saturate #(
    parameter int IN  = 33,
    parameter int OUT = 8
) (
    input  logic signed [IN-1:0]  x,
    output logic signed [OUT-1:0] y
);
    logic fits;
    // every bit above the sign is the sign
    assign fits = (&x[IN-1:OUT-1]) | ~(|x[IN-1:OUT-1]);
    assign y = fits ? x[OUT-1:0] : {x[IN-1], {(OUT - 1) {~x[IN-1]}}};
endmodule
